"""Starting, watching and stopping a vLLM server: the command, the process group, and the proof that it answers."""
