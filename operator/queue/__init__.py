"""Which object is reconciled when: a de-duplicating queue of keys and a bounded pool of workers."""
