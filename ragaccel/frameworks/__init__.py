"""What integrations of frameworks need: shared models, the registry, prompts taken apart."""
