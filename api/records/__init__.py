"""What the database keeps of objects and inference: job history, compute by the hour, usage."""
