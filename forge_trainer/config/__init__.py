"""Configuration: pydantic models, YAML files, command-line overrides. Never imports torch."""
