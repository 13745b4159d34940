"""The number format of kvtier in torch and triton. Imports torch, triton, numpy and floor 0 of kvtier (layout, identity, artifact, errors) only."""
