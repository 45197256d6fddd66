"""The HTTP end: who asks, JSON in, JSON out. Which episode a request belongs to, its key says."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from forge_trainer.errors import RolloutError

from .answers import error_answer, models_answer, streamed_answer, whole_answer
from .asked import RefusedError
from .session import Session, unknown_key

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LARGEST_BODY = 64 * 2**20
BACKLOG = 4096
"""All episodes of a batch may connect at once."""
SHUTDOWN_S = 5.0


class ChatServer:
    """Listens on a free port of `host`, from the first episode on."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._one_start = asyncio.Lock()

    @property
    def base_url(self) -> str:
        """What a client of OpenAI's takes as `base_url`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """The key with which requests reach the session meanwhile."""
        await self._start()
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            await session.end()

    async def close(self) -> None:
        """Listen no longer."""
        async with self._one_start:
            runner, self._runner = self._runner, None
            if runner is not None:
                await runner.cleanup()

    async def _start(self) -> None:
        async with self._one_start:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_answer_errors])
            app.router.add_post("/v1/chat/completions", self._complete)
            app.router.add_get("/v1/models", self._list_models)
            # A client that goes away cancels what it has asked for.
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
            )
            await runner.setup()
            site = web.TCPSite(runner, self._host, 0, backlog=BACKLOG)
            try:
                await site.start()
            except OSError as error:
                await runner.cleanup()
                raise RolloutError(
                    f"environment.options.host: cannot listen at {self._host}: {error}"
                ) from error
            self._runner = runner
            self._port = runner.addresses[0][1]

    def _session(self, request: web.Request) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise unknown_key()
        return session

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response(models_answer())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = session.read(await request.read())
        answered = await session.answer(asked)
        if asked.stream:
            # It is known as a whole by now, so that no error can come in the midst of it.
            events = "".join(streamed_answer(answered, asked))
            return web.Response(text=events, content_type="text/event-stream")
        return web.json_response(whole_answer(answered, asked))


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's form."""
    try:
        return await handler(request)
    except RefusedError as refused:
        return _error(refused)
    except web.HTTPException as error:
        what = f"{request.method} {request.path}: {error.reason}"
        return _error(RefusedError(what, code="not_served", status=error.status))


def _error(refused: RefusedError) -> web.StreamResponse:
    body: Any = error_answer(refused)
    return web.json_response(body, status=refused.status)
