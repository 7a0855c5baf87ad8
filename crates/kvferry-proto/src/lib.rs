//! Sans-IO protocol machines and wire format of kvferry.
