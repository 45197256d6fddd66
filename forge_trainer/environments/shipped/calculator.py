"""Arithmetic with a calculator to call, and then an answer to give."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

from forge_trainer.types import Message, Opening, Prompt, Reply, StopReason, ToolCall

INSTRUCTIONS = "Compute with the calculator, then answer with the number alone."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "Numbers, + - * / and brackets."}
            },
            "required": ["expression"],
        },
    },
}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_CHARACTERS = 200


class Calculator:
    """Answers calls until the model answers the question, which ends the episode.

    Reward `correct`: 1 for the task's answer, white space around it aside. What is wrong with a
    call is told to the model. Metric `calls`.
    """

    async def reset(self, task: Prompt, seed: int) -> Opening:
        self._answer = task.answer
        self._num_calls = 0
        question = task.messages or (Message("user", task.text),)
        return Opening((Message("system", INSTRUCTIONS), *question), (CALCULATOR,))

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        metrics = {"calls": float(self._num_calls + len(message.tool_calls))}
        if message.tool_calls:
            self._num_calls += len(message.tool_calls)
            return Reply(tuple(map(_answered, message.tool_calls)), metrics=metrics)
        if "<tool_call>" in message.content:
            return Reply((Message("user", "error: that is no call in JSON"),), metrics=metrics)
        correct = message.content.strip() == self._answer
        return Reply(done=True, rewards={"correct": float(correct)}, metrics=metrics)

    async def close(self) -> None:
        pass


def prompts(seed: int, largest: int = 99) -> Iterator[Prompt]:
    """Questions such as `17 * 4 - 30 =` without end, for `task.name`."""
    rng = random.Random(seed)
    while True:
        a, b, c = (rng.randint(1, largest) for _ in range(3))
        first, second = rng.choice("+-*"), rng.choice("+-")
        question = f"{a} {first} {b} {second} {c}"
        yield Prompt(f"{question} =", _shown(evaluate(question)), task="calculator")


def evaluate(expression: str) -> float:
    """Its value.

    Raises:
        ValueError: it is no arithmetic expression, or a long one.
        ZeroDivisionError: as it says.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("this is no expression") from error


def _answered(call: ToolCall) -> Message:
    try:
        if call.name != "calculator":
            raise ValueError(f"there is no tool {call.name}")
        result = _shown(evaluate(str(call.arguments.get("expression", ""))))
    except (ValueError, ArithmeticError) as error:
        result = f"error: {error}"
    return Message("tool", result, tool_call_id=call.id)


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("only numbers, + - * / and brackets are known")


def _shown(value: float) -> str:
    """12.0 -> `12`."""
    return str(int(value)) if value.is_integer() else f"{value:.10g}"
