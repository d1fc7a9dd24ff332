"""Why a job waits, and the smallest changes that would start it."""
