"""The SSD tier: one data file and a journal that says what is where.

What each file decides:

ssd               put, get, delete and evict on the disk; what happens when it fails
data_file         slots by offset, straight between file and memory
index             the journal that follows the ledger, tombstones and namespaces in it, when a checkpoint is written
journal           the bytes of journals and checkpoints
recovery          from the files of the index to what is live, at a start
directory         who owns a directory, its format, and the times-to-live kept in it
disk              every call to the file system, replaceable in tests
inspection        `kvtier fsck`: the offline check and repair
"""
