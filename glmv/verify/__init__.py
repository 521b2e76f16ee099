"""The judge: holds what the machine computed against the law, within budgets derived from measured rounding noise."""
