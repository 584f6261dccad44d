"""One of eight tensor-parallel ranks of GLM-5 as a model of its own: its file, its engine, its times."""
