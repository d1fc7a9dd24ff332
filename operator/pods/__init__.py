"""Pods: our own manifests, the reading of ports, orphans, and other controllers' pods that opted in."""
