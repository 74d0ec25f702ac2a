"""What is learned, as data: objectives, the papers' methods and their schedules."""
