"""From scraped samples to throughput, efficiency and progress."""
