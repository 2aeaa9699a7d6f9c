"""Floor 14: the command line; each verb imports its room when it runs."""
