"""Who used how many joules: counters of boards and hosts, shared among the pods that hold them."""
