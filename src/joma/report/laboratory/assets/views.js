/* What each part draws, by its name. */

import { viewEqn6 } from "./view_eqn6.js";
import { viewHierarchies } from "./view_hierarchies.js";
import { viewTheorem1 } from "./view_theorem1.js";
import { viewTheorem3 } from "./view_theorem3.js";
import { viewTheorem2 } from "./view_theorem2.js";

const VIEWS = {
  theorem2: viewTheorem2, theorem1: viewTheorem1, theorem3: viewTheorem3, eqn6: viewEqn6,
  hierarchies: viewHierarchies,
};

/** Plots, numbers and simulation of one part with its settings. */
export const view = (section, settings) => VIEWS[section](settings);
