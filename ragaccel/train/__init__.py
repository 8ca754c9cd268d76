"""Training: the recipes behind the models that ship with the package."""
