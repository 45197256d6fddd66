"""What a model costs by its numbers: floating-point operations, memory."""
