"""Episodes of agents: programs that ask for completions over OpenAI's chat protocol."""
