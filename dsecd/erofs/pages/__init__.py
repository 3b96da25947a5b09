"""The page server: a small process that fills images while they are read.

`fan` speaks fanotify, `journal` remembers whose reads are unanswered, `cachefile` is one sparse file and what it
holds, `chunks` brings what is missing, `evict` takes away what nobody reads, `trace` learns what an image's runs read,
`table` keeps the files, `server` ties all together and `control` puts a socket before it (`model` has its messages).
`client` is the daemon's end: it starts the process, keeps a copy of its fanotify group, and starts it again.

    reader ── read(2) ──> EROFS ──> cache/<hex>.data (sparse, marked)
                                        │ pre-content event: the reader waits in the kernel
                                        v
      server.reader ── all there? ── yes ──────────────> allow
                            │ no                           ^
                            v                              │ bit set after the write
                 chunks.wanted (faults, then read-ahead, then trace) ──> store, or a file with the same chunk;
                                                           sha256 compared, written, never the other way round
"""
