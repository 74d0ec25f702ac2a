"""`stillroom compare`: one teacher, several methods and students, equal budgets of tokens, several seeds."""
