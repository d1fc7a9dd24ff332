"""The container images: what is in them, how they are built, and their lock files.

::

    busbar-base         Debian with Python, CA certificates and tini      (from mmdebstrap, once)
      ├── …-platform-deps   /opt/venv from requirements-platform.lock     (when the lock changes)
      │     └── busbar-platform    our source in /opt/busbar              (when our source changes)
    the same with a C compiler and Python's headers, which Triton needs
      └── …-workloads-deps  /opt/venv from requirements-workloads.lock
            └── busbar-workloads
    busbar-pause        the process that holds a pod's namespaces

Every image is tagged with a digest of its inputs. So one look-up in the registry's storage tells whether it exists,
and a running cluster rolls out exactly when an input has changed.  Only the last layer holds our
source: a change in it costs a second to build and push. With it goes a list of all that is in the image (``sbom.py``).

The host's proxy, index and certificate settings work inside the build through its environment and mounts;
none of them is recorded in an image.
"""
