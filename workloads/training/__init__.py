"""Busbar's training engine: a `transformers` causal LM trained with its optimizer state where it fits.

The engine runs in two places with one manifest: in a pod (`python -m busbar.workloads.training`, which
reads `BUSBAR_*` variables) and alone (`busbar train job.yaml`). Reading order of the modules:

    settings, job   what the user asked for, checked field by field
    plan         who needs how many bytes on the device and on the host; refuses before allocation (no torch)
    arena        the memory the plan granted, with an owner for every byte
    streams      queues of copies and updates, and the events between them (CPU threads or CUDA streams)
    groups       parameters and gradients as views of flat buffers, one per transformer block
    optimizer    AdamW whose state is resident or streamed through staging slots, chunk by chunk
    corpus, tokenizer, packing   from files to the batch of step n, a pure function of (seed, n)
    checkpoint, journal          snapshots written in the background; what was done since the last one
    trainer      the loop of one step
    evaluation, ngram, export    bits per byte, and the directory that `transformers` loads
    status, port                 what the operator and people see while it runs
    session      all of the above in order, with signals; `command` and `__main__` start it

This package imports nothing heavy by itself, so that `busbar --help` stays instant.
"""
