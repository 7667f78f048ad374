"""The command line: one small file per command. Torch is imported only inside the command that needs it."""
