"""What each tenant and pool has allocated now, and past use with its half-life."""
