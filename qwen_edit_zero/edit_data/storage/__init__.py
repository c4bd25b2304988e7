"""Where bytes lie: folders, object stores, members of archives; retries, time-outs and a bounded local cache."""
