"""The papers' claims that need no large model, regenerated: each as a page with tables and a figure."""
