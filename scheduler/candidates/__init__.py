"""Every way a job could run, what each is worth, and what an accelerator-hour costs when everybody bids."""
