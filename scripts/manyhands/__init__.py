"""Many Hands: neural-network training spread over many processors, built by hand."""

import os

if os.name != "posix":  # ranks are forked, stopped by signals, and meet over sockets of Unix
    raise ImportError(
        "Many Hands needs Linux or macOS; on Windows install it in WSL2: see README.md, Start"
    )
