"""Teachers and students: opening them, a student's shape and first weights, what is read inside them."""
