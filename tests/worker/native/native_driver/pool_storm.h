#pragma once

// Returns the number of faults.
int pool_storm();
