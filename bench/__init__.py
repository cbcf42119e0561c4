"""What the process models cost, measured over HTTP on servers started for the purpose."""
