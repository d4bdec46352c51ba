"""The training job: what is shipped into the pods, and runs the same on a laptop, on any Kubernetes and on AWS."""
