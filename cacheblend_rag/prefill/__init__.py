"""Around the blend pass: lead-ins, index-time passes, and the pass that fuses a prompt's chunks."""
