"""Busbar's training engine: a `transformers` causal LM trained with its optimizer state on the device or the host, as
memory allows.

The engine runs in two places with one manifest: in a pod (`python -m busbar.workloads.training`, which
reads `BUSBAR_*` variables) and alone (`busbar train job.yaml`). Reading order of the modules:

    settings, job   the user's settings, checked field by field
    limits       what memory and processors this process may use, and the peak of what it used
    plan         bytes per owner on the device and on the host; refuses before allocation (no torch)
    arena        the memory the plan granted, with an owner for every byte
    streams      queues of copies and updates, and the events between them (CPU threads or CUDA streams)
    groups       parameters and gradients as views of flat buffers, one per transformer block
    optimizer    AdamW whose state is resident or streamed through staging slots, chunk by chunk
    corpus, tokenizer, packing   from files to the batch of step n, a pure function of (seed, n)
    snapshot, checkpoint, saver  a step's state through a few buffers to disk, while training continues
    journal      the steps since the last checkpoint, and whether a repeated step repeats its loss
    trainer      the loop of one step
    evaluation, ngram, export    bits per byte, and the directory that `transformers` loads
    status, port                 the status for the operator and people while it runs
    session      all of the above in order, with signals; `command` and `__main__` start it
    plan_command the resources that a job would need on another machine; `plan_text` tells a person

This package imports no heavy module by itself, so that `busbar --help` stays fast.
"""
