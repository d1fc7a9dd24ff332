"""What a decision is made from and what it is: snapshot, performance table, events, plans, and their JSON."""
