"""Commands about a manifest, before anything is paid: no cluster and no GPU is needed."""
