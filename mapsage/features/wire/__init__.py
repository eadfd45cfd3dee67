"""Messages between an encoder and a head: headers, payloads, and the link that carries them."""
