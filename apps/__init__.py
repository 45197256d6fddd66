"""Apps: short scripts over forge_trainer."""
