"""Recording of connections and HTTP exchanges."""
