"""What AWS bills: network, control plane, node groups, storage, identity, auto-stop. Imports nothing of workloads/."""
