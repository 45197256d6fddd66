"""One file per suite; each has `async run() -> list[Row]`."""
