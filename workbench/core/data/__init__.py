"""Data: documents, tokenizers, the split, the training order and the evaluation sets (numpy only).

corpus.py           documents from the sample package or from text files (text_files.py: of one)
tokenizer.py        text to token ids; rank_files.py finds, checks and reads vocabularies
encoded.py          the encoded corpus: built once, kept in the store, memory-mapped
split.py            which document trains and which one evaluates (sides.py: the rule)
near_duplicates.py  documents that belong together; overlap.py: what stands in the training text
shards.py           token shards, read and written
prepare.py          text into shards, on all cores; prepared_folder.py: where they appear
inspection.py       what a shard holds
batches.py          the training order: sequence i of a run, and the digest of what was consumed
evaluation_sets.py  what is scored, in which windows
loading.py          spec in, all of the above out
"""
