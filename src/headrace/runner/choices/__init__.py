"""What the plan decides, a subject a file: the values, their reasons, and which asks conflict."""
