"""What Kubernetes runs: device plugins, the KubeRay operator, the Ray cluster and the training job."""
