"""Speed, measured side by side: ``step`` takes one step apart in one process, ``speed`` runs whole jobs and what others would run."""
