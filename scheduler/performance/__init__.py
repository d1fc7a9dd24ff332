"""What the performance table learns from reported speeds, and whose reports are believed."""
