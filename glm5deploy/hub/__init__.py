"""Getting a quantisation's shards from a model hub: listed, pinned to a commit, transferred and proved by hash.

The only package that imports huggingface_hub. Listing, authentication, redirects and xet tokens are that library's;
byte ranges, resuming, stall rules and hashing are written here, because its plain-HTTP download starts a shard
over after a restart.
"""
