"""The command `kvtier`: it asks a daemon through the client library, or reads files.

What each file decides:

app               which files have commands; options that all have; errors to exit codes
output            exit codes, tables, JSON, progress
inputs            namespaces, hashes, ranges and bodies from a command line
blocks            lookup, get, put, delete, pin, unpin
status            status
namespace         namespaces, show, diff, drop, ttl; namespace: a description from a model's files
artifacts         import-scales, artifact show, diff, verify
quality           calibrate, evaluate
plan              plan
replay            replay: a trace against orders of eviction
simulator         the orders of eviction that replay compares
doctor            doctor: what this host gives
fsck              fsck: the offline check of an SSD directory
bench             bench: benchmarks of a checkout
token             token: a line for the daemon's token file
"""
