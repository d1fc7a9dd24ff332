"""What callers read and change: jobs, services, pods, pools, tenants, speeds, previews, the overview."""
