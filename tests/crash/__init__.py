"""What a ledger must survive: simulated power loss, ``kill -9`` and failing disks, on the product's own store.

``python -m tests.crash power`` and ``python -m tests.crash kill`` are the long forms; short ones run with the tests.
"""
