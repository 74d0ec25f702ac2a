"""Teachers and students: opening them, a student's shape and first weights, and reading activations."""
