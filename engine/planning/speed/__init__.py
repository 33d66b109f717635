"""How long a token will take: what is known of devices and links, what a layout reads, and what answers teach."""
