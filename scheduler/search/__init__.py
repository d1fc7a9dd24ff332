"""The steps of a scheduling round: start, preempt, swap, move, and the mixed-integer program."""
